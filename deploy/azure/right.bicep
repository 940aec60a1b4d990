// Gives one identity one role in one resource group.

param principal string
param role string

resource right 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(resourceGroup().id, principal, role)
  properties: {
    principalId: principal
    principalType: 'ServicePrincipal'
    roleDefinitionId: role
  }
}
